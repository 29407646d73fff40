"""What this machine is and does: `artel doctor` and `artel hardware`."""
