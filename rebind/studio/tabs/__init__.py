"""The tabs of the page. Each module has `routes(studio)`, and `static/<name>.js` mounts the tab in the browser."""
