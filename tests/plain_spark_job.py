"""A job of PySpark that never starts Headrace: it copies a topic by `format("headrace-kafka")`, then ends.

usage: python plain_spark_job.py SERVERS SOURCE TARGET CHECKPOINT JARS RECORDS_PER_BATCH
"""

import sys

from pyspark.sql import SparkSession

from pyspark_headrace import keyed

servers, source, target, checkpoint, jars, most = sys.argv[1:]
files = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.driver.extraClassPath", jars)
    .config("spark.ui.enabled", "false")
    .config("spark.sql.streaming.checkpointFileManagerClass", files)
    .config("spark.sql.adaptive.streaming.stateless.enabled", "false")
    .getOrCreate()
)
kafka = {"kafka.bootstrap.servers": servers}
rows = spark.readStream.format("kafka").options(**kafka, subscribe=source, startingOffsets="earliest")
copied = rows.option("maxOffsetsPerTrigger", most).load().selectExpr("key", "CAST(value AS STRING) AS value")
writer = keyed(copied, 2).writeStream.format("headrace-kafka").options(**kafka, topic=target, name=f"{target}.copy")
writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination()
