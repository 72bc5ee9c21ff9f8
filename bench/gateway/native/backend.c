/* The engines behind the proxies: one process, several ports, OpenAI's chat API with constant tokens.
 *
 *     backend PORTS      prints its ports in one line, and serves until standard input ends
 *
 * A chat request gets its response at once, or, with "stream": true, "max_tokens" events: the first at once, then one at
 * each step of its port, every "seed" milliseconds (default 5). As with continuous batching, a step serves all streams
 * of its port; the ports are not synchronized. (No router drops these fields, though one renames "max_tokens" to
 * "max_completion_tokens".) GET /counts returns the number of chat requests and of open streams of a port.
 * fallback/backend.py does the same in Python.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { MAX_PORTS = 64, EVENTS = 256, FIRST_ROOM = 4096, MOST_BODY = 16 << 20, EDGE = 2048 };
enum { GONE = EPOLLRDHUP | EPOLLHUP | EPOLLERR };

#define EVENT "data: {\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion.chunk\",\"created\":1700000000," \
    "\"model\":\"bench\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" token\"},\"finish_reason\":null}]}\n\n"
#define DONE "data: [DONE]\n\n"
#define ANSWER "{\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion\",\"created\":1700000000,\"model\":\"bench\"," \
    "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"The points are set, the signal is " \
    "green, and the train for the harbour leaves from the third track as soon as the last carriage is coupled.\"}," \
    "\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":96,\"completion_tokens\":24,\"total_tokens\":120}}"
#define STREAM "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"

enum kind { LISTENER, TIMER, INPUT, CLIENT };

struct source {              /* the source of an epoll event */
    enum kind kind;
    int fd;
    int port;                /* index of the port */
};

struct client {
    struct source source;
    char *in;                /* the request being received */
    size_t used, room;
    size_t head, whole;      /* bytes of the head and of the request; 0: head incomplete */
    int left;                /* events still to send; 0: not streaming */
    uint64_t due, pace;      /* when the next event is due, and the time between two steps, in ns */
    bool closed;               /* closed while its next event was due */
};

struct port { int number; long requests, open; } ports[MAX_PORTS];

static int ports_used, poll_fd, timer_fd;
static struct client **due_streams;            /* binary heap of streams, by `due` */
static int due_used, due_room;
static char event_chunk[512], last_chunk[1024], answer[2048];
static size_t event_size, last_size, answer_size;

static void fail(const char *what) { perror(what); exit(1); }

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + t.tv_nsec;
}

/* Due events */

static void put(struct client *client) {
    if (due_used == due_room) {
        due_room = due_room ? 2 * due_room : 256;
        if (!(due_streams = realloc(due_streams, due_room * sizeof *due_streams))) fail("memory");
    }
    int at = due_used++;
    while (at && due_streams[(at - 1) / 2]->due > client->due) {
        due_streams[at] = due_streams[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    due_streams[at] = client;
}

static struct client *take(void) {
    struct client *first = due_streams[0], *last = due_streams[--due_used];
    int at = 0;
    for (int child; (child = 2 * at + 1) < due_used; at = child) {
        if (child + 1 < due_used && due_streams[child + 1]->due < due_streams[child]->due) child++;
        if (due_streams[child]->due >= last->due) break;
        due_streams[at] = due_streams[child];
    }
    due_streams[at] = last;
    return first;
}

static void set_timer(void) {
    static uint64_t set_for;
    uint64_t due = due_used ? due_streams[0]->due : 0;
    if (due == set_for) return;
    struct itimerspec spec = {.it_value = {.tv_sec = due / 1000000000u, .tv_nsec = due % 1000000000u}};
    timerfd_settime(timer_fd, TFD_TIMER_ABSTIME, &spec, NULL);
    set_for = due;
}

/* Responses */

static void drop(struct client *client) {
    close(client->source.fd);
    free(client->in);
    client->in = NULL;
    if (client->left) {
        ports[client->source.port].open--;
        client->closed = true;             /* freed when its event is due */
    } else {
        free(client);
    }
}

/* Responses are small compared with a socket buffer: a client that lets it fill up is disconnected. */
static bool say(struct client *client, const void *text, size_t size) {
    return send(client->source.fd, text, size, MSG_NOSIGNAL) == (ssize_t)size;
}

static bool say_page(struct client *client, const char *status, const char *type, const char *text) {
    char page[4096];
    int size = snprintf(page, sizeof page, "HTTP/1.1 %s\r\ncontent-type: %s\r\ncontent-length: %zu\r\n\r\n%s", status,
                        type, strlen(text), text);
    return say(client, page, size);
}

static bool send_events(struct client *client, bool first) {
    char text[sizeof STREAM + sizeof event_chunk + sizeof last_chunk];
    size_t size = 0;
    if (first) size += sizeof STREAM - 1, memcpy(text, STREAM, size);
    memcpy(text + size, event_chunk, event_size);
    size += event_size;
    if (client->left == 1) memcpy(text + size, last_chunk, last_size), size += last_size;
    return say(client, text, size);
}

/* The number after "name": in a JSON text; routers may write it with or without a space. */
static long number_of(const char *text, size_t size, const char *name, long otherwise) {
    const char *found = memmem(text, size, name, strlen(name));
    if (!found) return otherwise;
    found += strlen(name);
    while (*found == ' ' || *found == ':') found++;
    if (!strncmp(found, "true", 4)) return 1;
    return *found >= '0' && *found <= '9' ? strtol(found, NULL, 10) : otherwise;
}

/* A field comes before or after the messages, so only the edges of a big body are searched. */
static long field_of(struct client *client, const char *name, long otherwise) {
    const char *body = client->in + client->head;
    size_t size = client->whole - client->head;
    if (size <= 2 * EDGE) return number_of(body, size, name, otherwise);
    long found = number_of(body, EDGE, name, -1);
    return found >= 0 ? found : number_of(body + size - EDGE, EDGE, name, otherwise);
}

static bool answer_chat(struct client *client) {
    struct port *port = &ports[client->source.port];
    port->requests++;
    if (field_of(client, "\"stream\"", 0) != 1) return say(client, answer, answer_size);
    client->left = (int)field_of(client, "\"max_tokens\"", field_of(client, "\"max_completion_tokens\"", 16));
    if (client->left < 1) client->left = 1;
    client->pace = (uint64_t)field_of(client, "\"seed\"", 5) * 1000000u;
    uint64_t now = now_ns(), phase = client->pace * client->source.port / ports_used;
    client->due = client->pace ? now - (now - phase) % client->pace + client->pace : now;
    bool sent = send_events(client, true);
    if (--client->left) port->open++, put(client);
    return sent;
}

static bool answer_page(struct client *client) {
    struct port *port = &ports[client->source.port];
    char text[2048];
    const char *path = memchr(client->in, ' ', client->head);
    path = path ? path + 1 : "";
    if (!strncmp(path, "/health", 7)) return say_page(client, "200 OK", "text/plain", "ok");
    if (!strncmp(path, "/counts", 7)) {
        snprintf(text, sizeof text, "{\"requests\":%ld,\"open\":%ld}", port->requests, port->open);
    } else if (!strncmp(path, "/v1/models", 10)) {
        snprintf(text, sizeof text, "{\"object\":\"list\",\"data\":[{\"id\":\"bench\",\"object\":\"model\","
                 "\"created\":1700000000,\"owned_by\":\"bench\",\"max_model_len\":131072}]}");
    } else if (strstr(path, "server_info") || strstr(path, "model_info")) {
        snprintf(text, sizeof text, "{\"model_path\":\"bench\",\"served_model_name\":\"bench\",\"tokenizer_path\":"
                 "\"bench\",\"is_generation\":true,\"tp_size\":1,\"dp_size\":1,\"version\":\"bench\"}");
    } else if (!strncmp(path, "/metrics", 8)) {
        snprintf(text, sizeof text,
                 "# TYPE vllm:num_requests_running gauge\n"
                 "vllm:num_requests_running{engine=\"0\",model_name=\"bench\"} %ld.0\n"
                 "# TYPE vllm:num_requests_waiting gauge\n"
                 "vllm:num_requests_waiting{engine=\"0\",model_name=\"bench\"} 0.0\n"
                 "# TYPE vllm:kv_cache_usage_perc gauge\n"
                 "vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"bench\"} 0.10\n"
                 "# TYPE vllm:cache_config_info gauge\n"
                 "vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"31250\",engine=\"0\"} 1.0\n",
                 port->open);
        return say_page(client, "200 OK", "text/plain; version=0.0.4", text);
    } else {
        return say_page(client, "404 Not Found", "application/json", "{\"error\":{\"message\":\"no such page\"}}");
    }
    return say_page(client, "200 OK", "application/json", text);
}

/* Requests */

static bool find_head(struct client *client) {
    char *end = memmem(client->in, client->used, "\r\n\r\n", 4);
    if (!end) return client->used < FIRST_ROOM * 4;
    client->head = end + 4 - client->in;
    client->whole = client->head;
    for (char *line = client->in; line < end; line = (char *)memmem(line, end + 2 - line, "\r\n", 2) + 2)
        if (!strncasecmp(line, "content-length:", 15)) client->whole += strtoul(line + 15, NULL, 10);
        else if (!strncasecmp(line, "transfer-encoding:", 18)) return false;  /* no proxy here sends chunks */
    return client->whole - client->head <= MOST_BODY;
}

static bool answer_request(struct client *client) {
    bool chat = !strncmp(client->in, "POST /v1/chat/completions", 25);
    bool work = chat || !strncmp(client->in, "POST /v1/completions", 20);
    bool well = work ? answer_chat(client) : answer_page(client);
    client->used = client->head = client->whole = 0;
    return well;
}

static bool read_client(struct client *client) {
    for (;;) {
        if (client->room - client->used < FIRST_ROOM / 2 || client->whole >= client->room) {
            client->room = client->whole >= client->room ? client->whole + FIRST_ROOM : 2 * client->room;
            if (!(client->in = realloc(client->in, client->room))) fail("memory");
        }
        size_t free_room = client->room - client->used - 1;
        ssize_t got = recv(client->source.fd, client->in + client->used, free_room, 0);
        if (got <= 0) return got < 0 && errno == EAGAIN;
        client->used += got;
        client->in[client->used] = 0;
        if (!client->whole && !find_head(client)) return false;
        if (client->whole && client->used >= client->whole && !answer_request(client)) return false;
        if ((size_t)got < free_room) return true;   /* edge-triggered: everything was read */
    }
}

static void send_due(void) {
    uint64_t now = now_ns();
    while (due_used && due_streams[0]->due <= now) {
        struct client *client = take();
        if (client->closed) {
            free(client);
            continue;
        }
        bool well = send_events(client, false);
        if (--client->left == 0) ports[client->source.port].open--;
        else client->due += client->pace, put(client);
        if (!well) drop(client);
    }
}

/* Sockets */

static void watch(struct source *source, uint32_t events) {
    struct epoll_event event = {.events = events, .data.ptr = source};
    if (epoll_ctl(poll_fd, EPOLL_CTL_ADD, source->fd, &event)) fail("epoll_ctl");
}

static void listen_on(int index) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    struct source *source = calloc(1, sizeof *source);
    source->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    source->port = index;
    if (bind(source->fd, (struct sockaddr *)&address, size) || listen(source->fd, 1024)) fail("listen");
    getsockname(source->fd, (struct sockaddr *)&address, &size);
    ports[index].number = ntohs(address.sin_port);
    watch(source, EPOLLIN);
}

static void welcome(struct source *listener) {
    for (int fd; (fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0;) {
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
        struct client *client = calloc(1, sizeof *client);
        client->source = (struct source){CLIENT, fd, listener->port};
        client->in = malloc(client->room = FIRST_ROOM);
        watch(&client->source, EPOLLIN | EPOLLRDHUP | EPOLLET);
    }
}

static void write_answers(void) {
    event_size = sprintf(event_chunk, "%zx\r\n%s\r\n", strlen(EVENT), EVENT);
    last_size = sprintf(last_chunk, "%zx\r\n%s\r\n0\r\n\r\n", strlen(DONE), DONE);
    answer_size = sprintf(answer, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s",
                          strlen(ANSWER), ANSWER);
}

int main(int count, char **words) {
    ports_used = count > 1 ? atoi(words[1]) : 8;
    if (ports_used < 1 || ports_used > MAX_PORTS) return fprintf(stderr, "backend PORTS (1 to %d)\n", MAX_PORTS), 2;
    write_answers();
    poll_fd = epoll_create1(EPOLL_CLOEXEC);
    timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    watch(&(struct source){TIMER, timer_fd, 0}, EPOLLIN);
    watch(&(struct source){INPUT, 0, 0}, EPOLLIN | EPOLLRDHUP);
    for (int index = 0; index < ports_used; index++) listen_on(index);
    for (int index = 0; index < ports_used; index++) printf("%d ", ports[index].number);
    printf("\n");
    fflush(stdout);
    for (struct epoll_event events[EVENTS];;) {
        int found = epoll_wait(poll_fd, events, EVENTS, -1);
        for (int at = 0; at < found; at++) {
            struct source *source = events[at].data.ptr;
            uint64_t times;
            if (source->kind == LISTENER) welcome(source);
            else if (source->kind == TIMER) (void)!read(timer_fd, &times, sizeof times);
            else if (source->kind == INPUT) return 0;
            else if (events[at].events & GONE || !read_client((struct client *)source)) drop((struct client *)source);
        }
        send_due();
        set_timer();
    }
}
