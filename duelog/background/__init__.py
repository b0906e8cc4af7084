"""What happens when time passes: maintenance and its thread, trimming, expiry, adoption, schedules, quarantine."""
