"""The model card of a converted checkpoint: front matter, then what was done and proved."""

from pathlib import Path
from typing import Any

import yaml

from difftool import __version__
from difftool.provenance import SourceRecord
from difftool.surgery.plan import Plan
from difftool.surgery.targets import load_target
from difftool.surgery.verify import Comparison

INHERITED = ("license", "license_name", "license_link", "language", "pipeline_tag", "datasets")


def write_card(
    folder: Path,
    plan: Plan,
    source: SourceRecord,
    command: str,
    comparisons: list[Comparison],
) -> None:
    """Write README.md: base model, command, verification, how to load."""
    front = {
        **_inherited(plan.source.path / "README.md"),
        "base_model": source.id,
        "library_name": "transformers",
        "tags": ["difftool", *plan.targets],
    }
    titles = " and ".join(load_target(name).TITLE for name in plan.targets)
    options = ", ".join(f"`{k}={v}`" for k, v in plan.options.model_dump().items())
    text = f"""---
{yaml.safe_dump(front, sort_keys=False, allow_unicode=True).strip()}
---
# {source.id.rsplit("/", 1)[-1]} with {titles}

Converted from `{source.id}`{f" at revision `{source.revision}`" if source.revision else ""} by
difftool {__version__}: `{command}` ({options}).

## Verification
{_verification(plan, comparisons)}

## Loading
The model classes are transformers' own with a graft that lies in this folder; it needs torch and
transformers only.

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("PATH", trust_remote_code=True, dtype="auto")
```

`difftool.json` has the chain of steps that made this checkpoint.
"""
    (folder / "README.md").write_text(text, encoding="utf-8")


def _verification(plan: Plan, comparisons: list[Comparison]) -> str:
    if not comparisons:
        return "Not verified (`--no-verify`)."
    rows = [
        f"| {c.dtype} | {c.verdict()} | {c.kl:.2g} | {c.top1_agreement:.2%} | "
        f"{'equal' if c.greedy_equal else 'differs'} |"
        for c in comparisons
    ]
    head = "| dtype | logits against the source | KL (nats) | top-1 agreement | greedy text |"
    return "\n".join([head, "|---|---|---|---|---|", *rows])


def _inherited(readme: Path) -> dict[str, Any]:
    """Return what of the source's own front matter still holds, its licence above all."""
    if not readme.is_file():
        return {}
    parts = readme.read_text(encoding="utf-8", errors="replace").split("---\n", 2)
    if len(parts) < 3 or parts[0].strip():
        return {}
    try:
        front = yaml.safe_load(parts[1])
    except yaml.YAMLError:
        return {}
    return {key: front[key] for key in INHERITED if isinstance(front, dict) and key in front}
