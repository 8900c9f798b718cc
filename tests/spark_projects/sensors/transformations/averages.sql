CREATE MATERIALIZED VIEW averages AS
SELECT sensor, avg(value) AS average
FROM readings
GROUP BY sensor
