"""The CUDA backend whose steps are captured as graphs. Apart from it, since the graphs are made of its kernels."""

from kvrelay.kernels.backend import DecodeGraphs, GraphSpec, PieceGraphs
from kvrelay.kernels.cuda.backend import CudaBackend
from kvrelay.kernels.cuda.cuda_graphs import CudaGraphs, ladder
from kvrelay.kernels.cuda.experts import has_grouped_products
from kvrelay.kernels.cuda.graph_pieces import StepPieces, sizes_up_to


class CapturingCudaBackend(CudaBackend):
    """CudaBackend with graphs of decode steps, and of pieces of steps with prompts."""

    def decode_graphs(self, spec: GraphSpec) -> DecodeGraphs | None:
        """Not for latent attention, which FlashInfer plans by another wrapper. Unverified on a GPU.

        Experts are captured where their products are grouped: otherwise their choice waits for the device.
        """
        if spec.shape.latent_dim is not None:
            return None
        if spec.expert_sizes is not None and not has_grouped_products(self.device, spec.dtype, *spec.expert_sizes):
            return None
        spec.reserve_positions(spec.max_blocks * spec.shape.block_size)  # all at once, so that no capture is lost
        return CudaGraphs(
            self,
            spec.shape,
            max_blocks=spec.max_blocks,
            sizes=ladder(spec.max_running),
            num_layers=spec.num_full_layers,
        )

    def piece_graphs(self, spec: GraphSpec) -> PieceGraphs | None:
        return StepPieces(self, spec.shape, sizes=sizes_up_to(spec.max_tokens))
