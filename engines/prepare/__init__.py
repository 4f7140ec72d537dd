"""Models on disk: names resolved, files fetched and checked, weights and packed blocks kept, all under content hashes."""
