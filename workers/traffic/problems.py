"""How the traffic plane says no. Each is a problem of the service's contract with a narrower meaning."""

from schemas.problems import Conflict, GatewayUnconfirmed, InternalError, Unavailable


class NotAcknowledged(GatewayUnconfirmed):
    """The gateway did not acknowledge in time. A shift was written back; a restore stays in place."""


class Rejected(InternalError):
    """The gateway refused the document. The one before it is in force and back in place."""


class StaleRevision(Conflict):
    """A newer split of the target exists, so this one comes from a controller that was overtaken."""


class ClusterRepointed(Conflict):
    """A cluster name in use would point at another address."""


class GatewayHeld(Conflict):
    """The dead-man switch has fired and nobody has recorded it yet. See `EnvoyGateway.take_notice`."""


class NothingPrepared(Conflict):
    """There is no prepared rollback for the target."""


class GatewayBusy(Unavailable):
    """Another process holds the gateway's lock."""


class ArmNotHealthy(Unavailable):
    """An arm that was to get more traffic does not pass the gateway's health check."""


class GatewayDown(Unavailable):
    """The gateway's admin socket does not answer."""
