"""The recording, which needs PyTorch: what modules get and return, what operators run, what autocast does to them."""
