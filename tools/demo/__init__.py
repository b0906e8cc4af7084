"""`duelog demo`: years of real delays replayed through a store, each message verified."""
