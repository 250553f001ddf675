// Serves the files of a folder.
const http = require('http'), fs = require('fs');
http.createServer((request, response) =>
    fs.createReadStream(process.argv[2] + request.url).pipe(response)).listen(8080, '::');
