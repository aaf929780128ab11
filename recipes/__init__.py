"""The recipes that ship with hf_offload: YAML files, and the small data sets they use."""
