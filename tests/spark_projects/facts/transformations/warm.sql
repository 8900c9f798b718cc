CREATE STREAMING TABLE warm
AS SELECT sensor, celsius FROM STREAM measurements WHERE celsius BETWEEN 20 AND 29;

CREATE MATERIALIZED VIEW sensors
AS SELECT sensor, count(*) AS n FROM measurements GROUP BY sensor
