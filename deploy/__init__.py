"""What deploying takes beside the product: images, charts, dashboards, and the sums behind them."""
