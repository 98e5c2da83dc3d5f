"""Settings of KV transfers between prefill and decode workers."""

from kvrelay.settings.choices import ChecksMode, TransportName
from kvrelay.settings.section import Section, setting


class TransferSettings(Section):
    """How KV travels from prefill to decode workers."""

    transport: TransportName = setting(
        "auto", "How decode workers read KV; auto: shared memory on one host, nixl for CUDA, else tcp."
    )
    checks: ChecksMode = setting(
        "full", "Checksums of KV regions, verified before commit: of all, of a random sample, or of none."
    )
    convert_dtype: bool = setting(
        False,
        "Allow different dtypes on prefill and decode workers: KV is cast on its way, and outputs may differ from "
        "those of one worker.",
    )
