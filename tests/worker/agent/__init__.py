"""The agent, against a server in memory."""
