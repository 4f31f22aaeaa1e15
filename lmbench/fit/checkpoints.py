"""Torch's distributed checkpoints as a plugin of Lightning's Trainer, to be measured beside Lightning's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.checkpoint.state_dict_saver import save

from lmbench.records.vocabulary import Values


class DistributedCheckpointIO(TorchCheckpointIO):
    """Saves each checkpoint as a folder, by torch.distributed.checkpoint; Lightning's AsyncCheckpointIO can wrap it."""

    def save_checkpoint(self, checkpoint: Values, path: Any, storage_options: Any = None) -> None:
        # Like a file, a checkpoint replaces one of the same name.
        self.remove_checkpoint(path)
        save(checkpoint, checkpoint_id=path)

    def load_checkpoint(self, path: Any, *arguments: Any, **options: Any) -> Values:
        """The whole checkpoint, on the host."""
        return _load_state_dict_from_keys(checkpoint_id=Path(path))
