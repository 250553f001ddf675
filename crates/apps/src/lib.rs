//! Servers that run on Tidegate or on kernel sockets: DNS, echo.
