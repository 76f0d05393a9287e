"""One file per architecture, in plain PyTorch; modules are named as in the checkpoints."""
