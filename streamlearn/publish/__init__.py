"""What a fleet of model servers is given: adapters under versioned names, and the state that routes requests."""

RUN, ROLLBACK = "publish.run", "publish.rolled_back_to"
"""Files of the state folder: identities of its runs, and the step that the run went back to."""
