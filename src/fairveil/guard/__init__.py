"""The client's guard: what stands between a server and a client's records."""

from fairveil.guard.guard import Guard as Guard
from fairveil.guard.policy import Policy as Policy
from fairveil.guard.policy import Proposal as Proposal
from fairveil.guard.status import status as status
