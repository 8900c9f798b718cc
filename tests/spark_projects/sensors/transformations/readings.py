from pyspark import pipelines as dp
from pyspark.sql import DataFrame
from pyspark.sql import functions as F


@dp.materialized_view
def readings() -> DataFrame:
    return spark.range(10).select("id", (F.col("id") % 3).alias("sensor"), (F.col("id") * 2.5).alias("value"))
