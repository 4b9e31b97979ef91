"""From a loss's jaxpr to one whose gradients are reduced where they are produced."""
