"""Short names for well-known models: one table, alias -> where the model lives on the hub.

`gated` means that the licence must be accepted on the model's page before anything can be
downloaded. The publishers change that at will, so it is a hint for `difftool models` only; the
hub's own answer decides.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Alias:
    """One well-known model: hub id, parameter count as its publisher words it, `model_type`."""

    hub_id: str
    parameters: str
    family: str
    gated: bool = False


ALIASES: dict[str, Alias] = {
    "llama-1b": Alias("meta-llama/Llama-3.2-1B", "1.2B", "llama", gated=True),
    "llama-1b-instruct": Alias("meta-llama/Llama-3.2-1B-Instruct", "1.2B", "llama", gated=True),
    "llama-3b": Alias("meta-llama/Llama-3.2-3B", "3.2B", "llama", gated=True),
    "llama-3b-instruct": Alias("meta-llama/Llama-3.2-3B-Instruct", "3.2B", "llama", gated=True),
    "llama-8b": Alias("meta-llama/Llama-3.1-8B", "8.0B", "llama", gated=True),
    "llama-8b-instruct": Alias("meta-llama/Llama-3.1-8B-Instruct", "8.0B", "llama", gated=True),
    "tinyllama-1.1b": Alias("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "1.1B", "llama"),
    "smollm2-135m": Alias("HuggingFaceTB/SmolLM2-135M", "135M", "llama"),
    "smollm2-135m-instruct": Alias("HuggingFaceTB/SmolLM2-135M-Instruct", "135M", "llama"),
    "smollm2-360m": Alias("HuggingFaceTB/SmolLM2-360M", "362M", "llama"),
    "smollm2-360m-instruct": Alias("HuggingFaceTB/SmolLM2-360M-Instruct", "362M", "llama"),
    "smollm2-1.7b": Alias("HuggingFaceTB/SmolLM2-1.7B", "1.7B", "llama"),
    "smollm2-1.7b-instruct": Alias("HuggingFaceTB/SmolLM2-1.7B-Instruct", "1.7B", "llama"),
    "smollm3-3b": Alias("HuggingFaceTB/SmolLM3-3B", "3.1B", "smollm3"),
    "smollm3-3b-base": Alias("HuggingFaceTB/SmolLM3-3B-Base", "3.1B", "smollm3"),
    "mistral-7b": Alias("mistralai/Mistral-7B-v0.3", "7.2B", "mistral"),
    "mistral-7b-instruct": Alias("mistralai/Mistral-7B-Instruct-v0.3", "7.2B", "mistral"),
    "ministral-8b": Alias("mistralai/Ministral-8B-Instruct-2410", "8.0B", "mistral", gated=True),
    "mixtral-8x7b": Alias("mistralai/Mixtral-8x7B-v0.1", "46.7B", "mixtral"),
    "mixtral-8x7b-instruct": Alias("mistralai/Mixtral-8x7B-Instruct-v0.1", "46.7B", "mixtral"),
    "qwen2.5-0.5b": Alias("Qwen/Qwen2.5-0.5B", "0.5B", "qwen2"),
    "qwen2.5-0.5b-instruct": Alias("Qwen/Qwen2.5-0.5B-Instruct", "0.5B", "qwen2"),
    "qwen2.5-1.5b": Alias("Qwen/Qwen2.5-1.5B", "1.5B", "qwen2"),
    "qwen2.5-1.5b-instruct": Alias("Qwen/Qwen2.5-1.5B-Instruct", "1.5B", "qwen2"),
    "qwen2.5-3b": Alias("Qwen/Qwen2.5-3B", "3.1B", "qwen2"),
    "qwen2.5-3b-instruct": Alias("Qwen/Qwen2.5-3B-Instruct", "3.1B", "qwen2"),
    "qwen2.5-7b": Alias("Qwen/Qwen2.5-7B", "7.6B", "qwen2"),
    "qwen2.5-7b-instruct": Alias("Qwen/Qwen2.5-7B-Instruct", "7.6B", "qwen2"),
    "qwen2.5-14b": Alias("Qwen/Qwen2.5-14B", "14.8B", "qwen2"),
    "qwen2.5-14b-instruct": Alias("Qwen/Qwen2.5-14B-Instruct", "14.8B", "qwen2"),
    "qwen3-0.6b": Alias("Qwen/Qwen3-0.6B", "0.6B", "qwen3"),
    "qwen3-0.6b-base": Alias("Qwen/Qwen3-0.6B-Base", "0.6B", "qwen3"),
    "qwen3-1.7b": Alias("Qwen/Qwen3-1.7B", "1.7B", "qwen3"),
    "qwen3-1.7b-base": Alias("Qwen/Qwen3-1.7B-Base", "1.7B", "qwen3"),
    "qwen3-4b": Alias("Qwen/Qwen3-4B", "4.0B", "qwen3"),
    "qwen3-4b-base": Alias("Qwen/Qwen3-4B-Base", "4.0B", "qwen3"),
    "qwen3-8b": Alias("Qwen/Qwen3-8B", "8.2B", "qwen3"),
    "qwen3-8b-base": Alias("Qwen/Qwen3-8B-Base", "8.2B", "qwen3"),
    "qwen3-14b": Alias("Qwen/Qwen3-14B", "14.8B", "qwen3"),
    "qwen3-14b-base": Alias("Qwen/Qwen3-14B-Base", "14.8B", "qwen3"),
    "qwen3-30b-a3b": Alias("Qwen/Qwen3-30B-A3B", "30.5B", "qwen3_moe"),
    "qwen3-30b-a3b-base": Alias("Qwen/Qwen3-30B-A3B-Base", "30.5B", "qwen3_moe"),
    "phi-3-mini": Alias("microsoft/Phi-3-mini-4k-instruct", "3.8B", "phi3"),
    "phi-3.5-mini": Alias("microsoft/Phi-3.5-mini-instruct", "3.8B", "phi3"),
    "phi-4-mini": Alias("microsoft/Phi-4-mini-instruct", "3.8B", "phi3"),
    "phi-4": Alias("microsoft/phi-4", "14.7B", "phi3"),
    "gemma-2b": Alias("google/gemma-2b", "2.5B", "gemma", gated=True),
    "gemma-7b": Alias("google/gemma-7b", "8.5B", "gemma", gated=True),
    "gemma-2-2b": Alias("google/gemma-2-2b", "2.6B", "gemma2", gated=True),
    "gemma-2-2b-it": Alias("google/gemma-2-2b-it", "2.6B", "gemma2", gated=True),
    "gemma-2-9b": Alias("google/gemma-2-9b", "9.2B", "gemma2", gated=True),
    "gemma-2-9b-it": Alias("google/gemma-2-9b-it", "9.2B", "gemma2", gated=True),
    "gemma-3-270m": Alias("google/gemma-3-270m", "268M", "gemma3_text", gated=True),
    "gemma-3-270m-it": Alias("google/gemma-3-270m-it", "268M", "gemma3_text", gated=True),
    "gemma-3-1b": Alias("google/gemma-3-1b-pt", "1.0B", "gemma3_text", gated=True),
    "gemma-3-1b-it": Alias("google/gemma-3-1b-it", "1.0B", "gemma3_text", gated=True),
    "olmo-2-1b": Alias("allenai/OLMo-2-0425-1B", "1.5B", "olmo2"),
    "olmo-2-1b-instruct": Alias("allenai/OLMo-2-0425-1B-Instruct", "1.5B", "olmo2"),
    "olmo-2-7b": Alias("allenai/OLMo-2-1124-7B", "7.3B", "olmo2"),
    "olmo-2-7b-instruct": Alias("allenai/OLMo-2-1124-7B-Instruct", "7.3B", "olmo2"),
    "olmo-3-7b": Alias("allenai/Olmo-3-1025-7B", "7.3B", "olmo3"),
    "olmo-3-7b-instruct": Alias("allenai/Olmo-3-7B-Instruct", "7.3B", "olmo3"),
    "granite-3.3-2b": Alias("ibm-granite/granite-3.3-2b-base", "2.5B", "granite"),
    "granite-3.3-2b-instruct": Alias("ibm-granite/granite-3.3-2b-instruct", "2.5B", "granite"),
    "granite-3.3-8b": Alias("ibm-granite/granite-3.3-8b-base", "8.2B", "granite"),
    "granite-3.3-8b-instruct": Alias("ibm-granite/granite-3.3-8b-instruct", "8.2B", "granite"),
    "granite-3.1-1b-a400m": Alias("ibm-granite/granite-3.1-1b-a400m-base", "1.3B", "granitemoe"),
    "granite-3.1-3b-a800m": Alias("ibm-granite/granite-3.1-3b-a800m-base", "3.3B", "granitemoe"),
    "gpt-oss-20b": Alias("openai/gpt-oss-20b", "20.9B", "gpt_oss"),
    "starcoder2-3b": Alias("bigcode/starcoder2-3b", "3.0B", "starcoder2"),
    "starcoder2-7b": Alias("bigcode/starcoder2-7b", "7.2B", "starcoder2"),
    "aya-23-8b": Alias("CohereLabs/aya-23-8B", "8.0B", "cohere", gated=True),
    "command-r7b": Alias("CohereLabs/c4ai-command-r7b-12-2024", "8.0B", "cohere2", gated=True),
    "glm-4-9b": Alias("zai-org/GLM-4-9B-0414", "9.4B", "glm4"),
    "exaone-4-1.2b": Alias("LGAI-EXAONE/EXAONE-4.0-1.2B", "1.3B", "exaone4"),
    "nemotron-mini-4b": Alias("nvidia/Nemotron-Mini-4B-Instruct", "4.2B", "nemotron"),
    "stablelm-2-1.6b": Alias("stabilityai/stablelm-2-1_6b", "1.6B", "stablelm"),
    "stablelm-3b": Alias("stabilityai/stablelm-3b-4e1t", "2.8B", "stablelm"),
    "moonlight-16b-a3b": Alias("moonshotai/Moonlight-16B-A3B", "16.0B", "deepseek_v3"),
    "deepseek-r1-qwen-1.5b": Alias("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "1.8B", "qwen2"),
    "deepseek-r1-qwen-7b": Alias("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "7.6B", "qwen2"),
    "deepseek-r1-llama-8b": Alias("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "8.0B", "llama"),
    "pythia-70m": Alias("EleutherAI/pythia-70m", "70M", "gpt_neox"),
    "pythia-160m": Alias("EleutherAI/pythia-160m", "162M", "gpt_neox"),
    "pythia-410m": Alias("EleutherAI/pythia-410m", "405M", "gpt_neox"),
    "pythia-1b": Alias("EleutherAI/pythia-1b", "1.0B", "gpt_neox"),
    "pythia-1.4b": Alias("EleutherAI/pythia-1.4b", "1.4B", "gpt_neox"),
    "gpt2": Alias("openai-community/gpt2", "124M", "gpt2"),
    "gpt2-medium": Alias("openai-community/gpt2-medium", "355M", "gpt2"),
    "gpt2-large": Alias("openai-community/gpt2-large", "774M", "gpt2"),
    "gpt2-xl": Alias("openai-community/gpt2-xl", "1.6B", "gpt2"),
}
