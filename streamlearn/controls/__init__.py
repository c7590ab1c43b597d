"""What an operator asks of a run: pause, pins, rollbacks and changes of regimes, durable and audited."""
