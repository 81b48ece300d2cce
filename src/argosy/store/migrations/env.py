"""What Alembic runs: the steps, on the connection and in the transaction that `migrate` has opened."""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
with context.begin_transaction():
    context.run_migrations()
