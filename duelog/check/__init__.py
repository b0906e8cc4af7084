"""The invariants of a store as code that looks at one: every problem is a finding. Changes nothing."""
