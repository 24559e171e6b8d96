"""The contract of algorithms, parties and runtimes; everything else imports it."""
