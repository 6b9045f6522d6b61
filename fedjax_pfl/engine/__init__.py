"""The engine: rounds of a method over clients, wherever they run. It knows no method, config or disk."""
