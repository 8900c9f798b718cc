from pyspark import pipelines as dp


@dp.table(comment="Measurements as they arrive")
def measurements():
    return spark.readStream.schema("sensor STRING, celsius DOUBLE").parquet(spark.conf.get("facts.folder"))


@dp.temporary_view
def above_zero():
    return spark.readStream.table("measurements").where("celsius > 0")


dp.create_streaming_table("hot")


@dp.append_flow(target="hot", name="from_measurements")
def from_measurements():
    return spark.readStream.table("above_zero").where("celsius >= 30")
