"""Work that the passing of time asks for: maintenance and its thread, reclaiming, policies, schedules, quarantine."""
