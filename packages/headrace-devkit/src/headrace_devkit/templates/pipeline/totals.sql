SELECT item, count(*) AS orders, sum(euros) AS euros
FROM orders
GROUP BY item
