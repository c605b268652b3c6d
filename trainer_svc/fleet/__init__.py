"""The replicas that subscribed: who they are, what they serve, and which one takes a prompt."""

from trainer_svc.fleet.fleet import Fleet as Fleet
from trainer_svc.fleet.replica import Replica as Replica
