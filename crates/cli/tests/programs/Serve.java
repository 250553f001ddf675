import com.sun.net.httpserver.*;
import java.net.*;
import java.nio.file.*;
import java.util.concurrent.*;

/** Serves a folder over HTTP at an address from four threads. */
class Serve {
    public static void main(String[] words) throws Exception {
        var server = HttpServer.create(new InetSocketAddress(words[1], 8080), 50);
        server.setExecutor(Executors.newFixedThreadPool(4));
        server.createContext("/", exchange -> {
            var path = Path.of(words[0], exchange.getRequestURI().getPath());
            exchange.sendResponseHeaders(200, Files.size(path));
            try (var body = exchange.getResponseBody()) { Files.copy(path, body); }
        });
        server.start();
    }
}
