"""What preparing rows needs of Spark: jobs that can be cancelled, and the settings of file systems."""
