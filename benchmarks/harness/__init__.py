"""Parts that workloads share: options, child processes, results, plots, and the message load of issue-sized runs."""
