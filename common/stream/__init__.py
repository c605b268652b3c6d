"""What both ends of the adapter stream share."""
