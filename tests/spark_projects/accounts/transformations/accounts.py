from pyspark import pipelines as dp


@dp.table(format="delta")
def accounts():
    schema = "id INT, name STRING, op STRING, at INT"
    changes = spark.readStream.schema(schema).json(spark.conf.get("accounts.folder"))
    return changes.where("op = 'U'").select("id", "name")
