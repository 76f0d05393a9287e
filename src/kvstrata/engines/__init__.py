"""Adapters to engines that are not our own, one package each."""
