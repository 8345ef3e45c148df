"""The decoder of Zamba2."""

from __future__ import annotations

from flax import nnx

from capibara.models.architectures.decoder import Decoder
from capibara.models.architectures.registry import model_of
from capibara.models.architectures.zamba.block import SharedBlocks, ZambaBlock
from capibara.models.architectures.zamba.config import ZambaConfig


@model_of(ZambaConfig)
class Zamba(Decoder):
    """Embedding, layers of mixers, blocks that some of these share, and the final norm."""

    config: ZambaConfig
    block = ZambaBlock
    layerwise = False
    reads_embedding = True

    def _make_layers(self, rngs: nnx.Rngs) -> None:
        super()._make_layers(rngs)
        self.shared = SharedBlocks(self.config, rngs)

    def _shared_blocks(self) -> list[nnx.Module | None]:
        blocks = self.shared.each()
        numbers = map(self.config.block_of, range(self.config.period))
        return [None if number is None else blocks[number] for number in numbers]
