"""TrainerCallbacks of hf_offload, one a file."""
