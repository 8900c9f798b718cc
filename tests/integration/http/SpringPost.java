import java.net.URI;
import java.nio.charset.StandardCharsets;
import org.springframework.http.HttpMethod;
import org.springframework.http.MediaType;
import org.springframework.http.client.JdkClientHttpRequestFactory;

/** Sends a record three times, and prints the statuses. */
public class SpringPost {
    public static void main(String[] arguments) throws Exception {
        var requests = new JdkClientHttpRequestFactory();
        for (var number = 0; number < 3; number++) {
            var request = requests.createRequest(URI.create(arguments[0]), HttpMethod.POST);
            request.getHeaders().setContentType(MediaType.APPLICATION_JSON);
            request.getBody().write("{\"records\": [{\"value\": \"x\"}]}".getBytes(StandardCharsets.UTF_8));
            try (var response = request.execute()) {
                System.out.println(response.getStatusCode().value());
            }
        }
    }
}
