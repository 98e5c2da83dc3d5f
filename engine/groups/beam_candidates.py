"""What may follow each beam of a search, from its row of logits."""

import math

import torch
from torch import Tensor

from kvrelay.engine.groups.beam import BeamCandidates
from kvrelay.engine.scheduling.sequence import Sequence


def likeliest(logits: Tensor, seqs: list[Sequence]) -> list[BeamCandidates]:
    """Each beam's likeliest continuations, as many as its search looks at. logits: [R, vocab], a row for each beam."""
    logp = torch.log_softmax(logits.float(), dim=-1)
    most = 1
    for row, seq in enumerate(seqs):
        search = seq.group.search if seq.group is not None else None
        assert search is not None
        most = max(most, search.rules.num_candidates)
        if seq.num_output < seq.request.sampling.min_tokens and search.rules.end_ids:
            logp[row, torch.tensor(sorted(search.rules.end_ids), device=logp.device)] = -math.inf
    values, ids = logp.topk(min(most, logp.shape[-1]), dim=-1)
    return [
        list(zip(row_ids, row_values, strict=True))
        for row_ids, row_values in zip(ids.tolist(), values.tolist(), strict=True)
    ]
