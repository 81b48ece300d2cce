"""Records of a fleet in the store: revisions, replicas, routes and rollouts, and the commands of people to them."""
