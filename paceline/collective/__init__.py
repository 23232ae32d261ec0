"""The process group over which trainer and samplers exchange versions; its members are processes of their own."""

from paceline.collective.process import GroupMember, GroupPlace

__all__ = ["GroupMember", "GroupPlace"]
