"""One file per command: parse, call one stage, print. Results to stdout, progress to stderr."""
