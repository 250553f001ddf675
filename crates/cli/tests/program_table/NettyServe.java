import io.netty.bootstrap.ServerBootstrap;
import io.netty.channel.*;
import io.netty.channel.nio.NioEventLoopGroup;
import io.netty.channel.socket.SocketChannel;
import io.netty.channel.socket.nio.NioServerSocketChannel;
import io.netty.handler.codec.http.*;
import java.io.File;

/** Serves the files of a folder from two event loops. */
class NettyServe {
    public static void main(String[] words) throws Exception {
        var group = new NioEventLoopGroup(2);
        var server = new ServerBootstrap().group(group).channel(NioServerSocketChannel.class);
        server.childHandler(new ChannelInitializer<SocketChannel>() {
            protected void initChannel(SocketChannel channel) {
                channel.pipeline().addLast(new HttpServerCodec(), new Answer(words[0]));
            }
        });
        server.bind("::", 8080).sync().channel().closeFuture().sync();
    }

    static class Answer extends SimpleChannelInboundHandler<HttpRequest> {
        final String folder;

        Answer(String folder) {
            this.folder = folder;
        }

        protected void channelRead0(ChannelHandlerContext context, HttpRequest request) {
            var file = new File(folder, request.uri());
            var head = new DefaultHttpResponse(HttpVersion.HTTP_1_1, HttpResponseStatus.OK);
            HttpUtil.setContentLength(head, file.length());
            context.write(head);
            context.write(new DefaultFileRegion(file, 0, file.length()));
            var end = context.writeAndFlush(LastHttpContent.EMPTY_LAST_CONTENT);
            end.addListener(ChannelFutureListener.CLOSE);
        }
    }
}
