"""Settings of KV transfers between prefill and decode workers."""

from kvrelay.settings.choices import ChecksMode, TransportName
from kvrelay.settings.section import Section, setting
from kvrelay.sizes import Size, parse_bytes


class TransferSettings(Section):
    """How KV travels from prefill to decode workers."""

    transport: TransportName = setting(
        "auto", "How decode workers read KV; auto: shared memory on one host, nixl for CUDA, else tcp."
    )
    checks: ChecksMode = setting(
        "full", "Checksums of KV regions, verified before commit: of all, of a random sample, or of none."
    )
    sampled_share: float = setting(0.1, "Share of the regions that `checks: sampled` verifies.", gt=0, le=1)
    lease_s: float = setting(10.0, "Blocks of a silent peer are freed after this time, on both sides.", unit="s", gt=0)
    deadline_s: float = setting(
        30.0, "A transfer that is not committed this long after its prefill fails.", unit="s", gt=0
    )
    stall_s: float = setting(
        2.0, "A read without progress for this long continues over another path, or fails.", unit="s", gt=0
    )
    window: Size = setting("64MiB", "Bytes that a prefill worker announces ahead of one decode worker's reads.")
    tcp_streams: int = setting(
        0, "Connections of one pair over tcp; 0: four between hosts, one on the same host.", ge=0, le=16
    )
    layers_per_announce: int = setting(0, "Layers in one announcement; 0: a quarter of the model.", unit="layers", ge=0)
    convert_dtype: bool = setting(
        False,
        "Allow different dtypes on prefill and decode workers: KV is cast on its way, and outputs may differ from "
        "those of "
        "one worker.",
    )

    @property
    def window_bytes(self) -> int:
        return parse_bytes(self.window)
