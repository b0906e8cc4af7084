"""The command line as a program for `spark-submit`: `spark-submit --py-files duelog.zip submit.py audit STORE --spark`.

`spark-submit` wants a file, not a module or an entry point; what it set (master, settings, packages) is what the job
gets, as long as the command is not given another --master.
"""

from duelog.tools.cli.main import main

if __name__ == "__main__":
    main()
