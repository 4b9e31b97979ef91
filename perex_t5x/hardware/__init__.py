"""What is known of TPUs, and devices that are not there."""
