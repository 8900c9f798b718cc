from pyspark import pipelines as dp

servers = spark.conf.get("tolls.servers")


@dp.table
def passages():
    options = {"kafka.bootstrap.servers": servers, "subscribe": spark.conf.get("tolls.passages")}
    rows = spark.readStream.format("kafka").options(**options, startingOffsets="earliest").load()
    return rows.selectExpr("from_json(cast(value AS STRING), 'plate STRING, cents INT') AS row").select("row.*")


dp.create_sink("heavy", "kafka", {"kafka.bootstrap.servers": servers, "topic": spark.conf.get("tolls.heavy")})


@dp.append_flow(target="heavy", name="to_heavy")
def to_heavy():
    rows = spark.readStream.table("passages").where("cents >= 500")
    return rows.selectExpr("plate AS key", "to_json(struct(*)) AS value")
