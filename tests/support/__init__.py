"""Helpers that several test packages share: real servers, fake engines and backends, accounts, clocks."""
