"""The process group over which the trainer sends versions to samplers; each member is a separate process."""

from paceline.collective.process import GroupMember, GroupMembership

__all__ = ["GroupMember", "GroupMembership"]
