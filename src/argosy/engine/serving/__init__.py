"""One replica between the network and the scheduler: http, the door, text, the core process."""
