"""When the next step may be launched before the last one's tokens are known. Pure.

The scheduler plans such a step as if each of these tokens were there: which ones they are changes nothing that it
decides, unless one of the conditions here holds. Then the last step is collected first, as on a device that computes
at once.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is known before the next step is planned. Counts are sequences and blocks."""

    num_running: int
    num_available: int  # blocks that can be had
    num_swapped: int
    num_groups: int
    drafts: bool  # the next step is to try tokens that are guessed from those before


def may_look_ahead(outlook: Outlook) -> bool:
    """Whether the next step can be planned now.

    Not while a sequence might be preempted: what it holds is being computed. Each running sequence takes up to one
    block more for its next token and one to write in instead of one that it shares; admission leaves one for each of
    them. Members of a group end, fork and wait for one another by the tokens that were drawn. A swapped sequence
    comes back as others go.
    """
    is_roomy = outlook.num_available >= 2 * outlook.num_running
    return is_roomy and not (outlook.num_swapped or outlook.num_groups or outlook.drafts)
